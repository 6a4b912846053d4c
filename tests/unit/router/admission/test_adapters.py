"""Adapters at the router: loads, swaps and losses; every output is its own adapter's."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from specray.errors import EngineLostError, InvalidRequestError
from specray.fakes import FakeAdapterTarget, LocalVerifier, VirtualClock
from specray.requests import AdapterRef, Resumption, SpeculationParams
from tests.unit.router.admission.adapted import CONFIG, NAMES, asking, digest_of, new_target, outputs
from tests.unit.router.harness import TARGET_S, Pair, expected, serving


@pytest.mark.parametrize("overlap", ["serial", "ahead"])
@pytest.mark.parametrize("max_adapters", [1, 2, 4])
async def test_every_request_gets_its_adapters_tokens_whatever_room_there_is(
    clock: VirtualClock, overlap: str, max_adapters: int
) -> None:
    target = new_target(max_adapters=max_adapters)
    names = ["", *NAMES] * 3
    given = [asking(name, f"{number}", max_tokens=9) for number, name in enumerate(names)]
    async with serving(clock, target=target, adapters=CONFIG, overlap=overlap) as pair:
        assert await outputs(pair, given) == [expected(each) for each in given]
        await pair.settle()
        assert len({expected(each) for each in given}) == 1 + len(NAMES)
        assert target.num_loads >= len(NAMES)
        assert pair.counted("specray_adapters_loaded") == max_adapters
        assert pair.counted("specray_adapter_loads_total", result="loaded") == target.num_loads


async def test_speculation_changes_no_token_and_the_draft_works_without_the_adapter(
    clock: VirtualClock,
) -> None:
    given = asking("sql", max_tokens=16)
    plain = replace(given, request_id="plain", speculation=SpeculationParams(enabled=False))
    async with serving(clock, target=new_target(), adapters=CONFIG, num_speculative_tokens=4) as pair:
        speculate, seen = pair.draft.speculate, []

        def watched(items: Any) -> Any:
            seen.extend(items)
            return speculate(items)

        pair.draft.speculate = watched  # type: ignore[method-assign]
        assert await outputs(pair, [given, plain]) == [expected(given)] * 2
        assert [item.sampling.adapter for item in seen if item.sampling is not None] == [b""]


async def test_a_draft_with_an_adapter_of_the_name_is_asked_with_it(clock: VirtualClock) -> None:
    from tests.unit.router.harness import fake_draft

    own = digest_of("the draft's own")
    draft = fake_draft(adapters=(own,), adapter_names=("sql",))
    speculate, seen = draft.speculate, {}

    def watched(items: Any) -> Any:
        seen.update({item.request_id: item.sampling.adapter for item in items if item.sampling is not None})
        return speculate(items)

    draft.speculate = watched  # type: ignore[method-assign]
    given = [asking(name) for name in ("sql", "chat", "")]
    async with serving(clock, target=new_target(), draft=draft, adapters=CONFIG) as pair:
        assert await outputs(pair, given) == [expected(each) for each in given]
    assert seen == {"of-sql": own, "of-chat": b"", "of-": b""}


async def test_a_target_that_knows_no_adapters_never_answers_for_one(clock: VirtualClock) -> None:
    async with serving(clock, adapters=CONFIG) as pair:
        with pytest.raises(InvalidRequestError, match="'sql' cannot be used: this target knows no adapters"):
            await pair.router.complete(asking("sql"))
        with pytest.raises(InvalidRequestError, match="this target knows no adapters"):
            await pair.router.load_adapter("sql")


async def test_an_adapter_that_cannot_be_loaded_fails_those_who_wait_and_nobody_else(
    clock: VirtualClock,
) -> None:
    target = new_target()
    async with serving(clock, target=target, adapters=CONFIG) as pair:
        wrong = [asking("nobody", f"w{number}") for number in range(3)]
        found = await asyncio.gather(
            *(pair.router.complete(each) for each in wrong),
            pair.router.complete(asking("sql")),
            return_exceptions=True,
        )
        sentence = (
            "adapter 'nobody' cannot be loaded: adapter folder 'nobody' is not in the directory of adapters"
        )
        assert [str(each) for each in found[:3]] == [sentence] * 3
        assert found[3].token_ids == expected(asking("sql"))  # type: ignore[union-attr]
        await pair.settle()
        # Once the folder is there, the same request is served.
        target.folders["nobody"] = digest_of("nobody")
        assert await outputs(pair, wrong) == [expected(each) for each in wrong]


async def test_the_same_name_with_other_bytes_is_another_and_running_requests_keep_theirs(
    clock: VirtualClock,
) -> None:
    target = new_target()
    async with serving(clock, target=target, adapters=CONFIG) as pair:
        old = asking("sql", "old", max_tokens=40)
        task = asyncio.create_task(pair.router.complete(old))
        await asyncio.sleep(8 * TARGET_S)
        target.folders["sql"] = digest_of("sql 2")
        assert await pair.router.load_adapter("sql") == digest_of("sql 2")
        await pair.router.unload_adapter(digest_of("sql"))
        new = asking("sql", "new", version="sql 2")
        assert await outputs(pair, [new]) == [expected(new)]
        assert not task.done()
        assert (await task).token_ids == expected(old)
        await pair.settle()
        assert [each.digest for each in target.slots.loaded] == [digest_of("sql 2")]
        with pytest.raises(InvalidRequestError, match=r"'sql' cannot be loaded: .* has other bytes now"):
            await pair.router.complete(asking("sql", "late"))


async def test_a_request_that_was_put_back_keeps_an_adapter_whose_files_have_changed(
    clock: VirtualClock,
) -> None:
    target = new_target()
    async with serving(clock, target=target, adapters=CONFIG) as pair:
        old = asking("sql", "old", max_tokens=40)
        task = asyncio.create_task(pair.router.complete(old))
        await asyncio.sleep(8 * TARGET_S)
        target.folders["sql"] = digest_of("sql 2")
        await pair.router.unload_adapter(digest_of("sql"))
        target.fail_next("old", "no room", is_retriable=True)
        assert (await task).token_ids == expected(old)
        assert pair.counted("specray_preemptions_total") == 1
        await pair.settle()
        assert target.slots.loaded == ()


async def test_what_the_target_has_lost_is_loaded_again_in_the_middle_of_outputs(clock: VirtualClock) -> None:
    """The next target knows nothing; the same tokens go on, also those that another router had begun."""
    targets = [new_target(), new_target()]
    made: list[LocalVerifier] = []

    async def connect() -> LocalVerifier:
        made.append(LocalVerifier(targets[len(made)], clock))
        return made[-1]

    given = [asking(name, max_tokens=30) for name in ("sql", "chat")]
    begun = asking("code", max_tokens=12)
    begun = replace(begun, resumed=Resumption(expected(begun)[:5], "toy-target"))
    async with serving(clock, verifier=connect, adapters=CONFIG) as pair:
        tasks = [asyncio.create_task(pair.router.complete(each)) for each in given]
        await asyncio.sleep(10 * TARGET_S)
        made[0].lose()
        rest = await pair.router.complete(begun)
        assert [(await task).token_ids for task in tasks] == [expected(each) for each in given]
        assert rest.token_ids == expected(begun)[5:]
        assert {each.digest for each in targets[1].slots.loaded} == {
            digest_of(n) for n in ("sql", "chat", "code")
        }


async def test_an_adapter_that_left_behind_the_routers_back_is_loaded_and_asked_again(
    clock: VirtualClock,
) -> None:
    target = new_target()
    async with serving(clock, target=target, adapters=CONFIG) as pair:
        await pair.router.load_adapter("sql")
        target.unload_adapter(digest_of("sql"))
        given = asking("sql")
        assert await outputs(pair, [given]) == [expected(given)]
        assert target.num_loads == 2


@pytest.mark.parametrize("seed", range(12))
async def test_any_order_of_requests_swaps_unloads_and_losses_ends_with_the_right_tokens(
    clock: VirtualClock, seed: int
) -> None:
    """Whoever was let in gets its tokens; only who waits for bytes that are gone is refused."""
    rng = random.Random(seed)
    folders = {name: digest_of(name) for name in NAMES}
    turn = asyncio.Lock()
    made: list[FakeAdapterTarget] = []
    verifiers: list[LocalVerifier] = []

    async def connect() -> LocalVerifier:
        # All targets see the same files.
        made.append(new_target(max_adapters=rng.choice([1, 2, 4])))
        made[-1].folders = folders
        verifiers.append(LocalVerifier(made[-1], clock))
        return verifiers[-1]

    async def use(pair: Pair, number: int) -> None:
        name = rng.choice(["", *NAMES])
        given = asking(name, f"r{number}", max_tokens=rng.randint(1, 20), temperature=rng.choice([0.0, 1.0]))
        if name:
            ref = AdapterRef(name, folders[name], name)
            given = replace(given, adapter=ref, sampling=replace(given.sampling, adapter=ref.digest))
        was = folders.get(name)
        try:
            assert (await pair.router.complete(given)).token_ids == expected(given)
        except InvalidRequestError as error:
            assert "has other bytes now" in str(error)
            assert folders[name] != was

    async def swap(pair: Pair, number: int) -> None:
        name = rng.choice(NAMES)
        async with turn:
            old, folders[name] = folders[name], digest_of(f"{name} {number}")
            assert await pair.router.load_adapter(name) == folders[name]
            await pair.router.unload_adapter(old)

    async with serving(clock, verifier=connect, adapters=CONFIG, num_speculative_tokens=3) as pair:
        tasks = []
        for number in range(60):
            match rng.random():
                case draw if draw < 0.75:
                    tasks.append(asyncio.create_task(use(pair, number)))
                case draw if draw < 0.9:
                    tasks.append(asyncio.create_task(swap(pair, number)))
                case draw if draw < 0.93 and len(made) < 4:
                    verifiers[-1].lose()
                case _:
                    for request_id in sorted(made[-1].held_request_ids)[:1]:
                        made[-1].fail_next(request_id, "no room", is_retriable=True)
            await asyncio.sleep(rng.choice([0.0, 0.5 * TARGET_S, 4 * TARGET_S]))
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            # A command finds no target while there is none.
            assert result is None or isinstance(result, EngineLostError), result
        await asyncio.sleep(1.0)
        assert made[-1].held_request_ids == frozenset()
        for adapter in made[-1].slots.loaded:
            made[-1].unload_adapter(adapter.digest)
        assert made[-1].slots.loaded == ()
