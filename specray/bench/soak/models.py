"""Several models of a soak: targets that differ in their weights, and the fault that unloads one of them."""

from __future__ import annotations

from pathlib import Path

from specray.bench.load.client import ServerClient
from specray.bench.testbed.models import make_other_model
from specray.config import Config, parse_config
from specray.errors import EngineLostError, SpecrayError


def with_models(config: Config, directory: Path, num_models: int) -> Config:
    """The configuration of a service of several pairs: the one of ``config``, and others of its shape.

    Raises:
        EngineLostError: no other target can be made of it.
    """
    from specray.engine.model.description import model_path

    source = Path(model_path(config.target, "target"))
    values = config.model_dump(mode="json")
    target, draft, _ = (values.pop(name) for name in ("target", "draft", "served_model_name"))
    paths = [source]
    paths += [make_other_model(source, directory / f"other-{n}", seed=n) for n in range(1, num_models)]
    values["models"] = [
        {"name": f"soak-{number}", "target": {**target, "model": str(path)}, "draft": draft}
        for number, path in enumerate(paths, 1)
    ]
    return parse_config(values)


async def churn_model(http: ServerClient, name: str) -> str:
    """Unloads a model while it is used, and loads it again, unless a request has done so.

    Raises:
        EngineLostError: a call failed.
    """
    try:
        await http.post("/v1/models/unload", {"model": name})
        status = await http.post("/v1/models/load", {"model": name})
    except SpecrayError as error:
        raise EngineLostError(f"{name} could not be unloaded and loaded: {error}") from None
    return f"{name} was unloaded, and loaded in {status['load_s']:.1f} s"
