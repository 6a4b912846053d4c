"""Computes gradients of many small batches on several single-threaded workers.

Each worker computes whole micro-batches, so a core that other programs use slows its own share only;
with threads inside every operation the slowest core would set the pace of each of them.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import torch
from torch import nn

LossFunction = Callable[[torch.Tensor], torch.Tensor]


class GradientWorkers:
    """Computes the gradient of a mean loss over micro-batches; use as a context manager."""

    def __init__(self, model: nn.Module, *, num_workers: int) -> None:
        self._parameters = list(model.parameters())
        self._pool = ThreadPoolExecutor(num_workers, initializer=torch.set_num_threads, initargs=(1,))

    def __enter__(self) -> "GradientWorkers":
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def accumulate(self, micro_batches: Sequence[torch.Tensor], loss_fn: LossFunction) -> float:
        """Sets every parameter's `grad` to that of the mean of `loss_fn` over all tokens; returns that mean.

        Sums run in the order of the micro-batches and in float32, so the result does not depend on
        which worker was faster.
        """
        num_tokens = sum(micro.numel() for micro in micro_batches)
        futures = [self._pool.submit(self._gradients, micro, loss_fn) for micro in micro_batches]
        totals: list[torch.Tensor] | None = None
        total_loss = 0.0
        for micro, future in zip(micro_batches, futures, strict=True):
            loss, gradients = future.result()
            share = micro.numel() / num_tokens
            total_loss += loss * share
            if totals is None:
                totals = [gradient.float() * share for gradient in gradients]
            else:
                for total, gradient in zip(totals, gradients, strict=True):
                    total.add_(gradient, alpha=share)
        assert totals is not None, "no micro-batches"
        for parameter, total in zip(self._parameters, totals, strict=True):
            parameter.grad = total.to(parameter.dtype)
        return total_loss

    def _gradients(
        self, micro: torch.Tensor, loss_fn: LossFunction
    ) -> tuple[float, tuple[torch.Tensor, ...]]:
        loss = loss_fn(micro)
        gradients = torch.autograd.grad(loss, self._parameters)
        return float(loss.detach()), gradients
