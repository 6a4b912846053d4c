"""Keys and values asked for ahead of time, while those of the chunk before are multiplied."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from specray.engine.kernels import fields, tiles
from specray.engine.kernels.flash.work import CHUNK, Work, first_token, run_of, runs_address, runs_at
from specray.engine.kernels.simd import kernel, prefetch
from specray.engine.kernels.team import as_pointer

STEPS = 2 * CHUNK // tiles.ROWS
"""Of a head in a chunk: each asks for as much of the next one."""
# Of what is asked for: the next token, its run, the chunk's first token, the end of the span and its runs.
_ASKED, _RUN, _CHUNK_ASKED, _END, _RUNS_OF = range(5)
_NUM_ASKED = 5


@kernel()
def ask_next(args: Any, span: Any, work: Work, chunk: int, after: Any) -> None:
    """Asks from now on for the next chunk; at the last one for the first of the span that comes after."""
    asked = carray(as_pointer(work.asked), (_NUM_ASKED,), np.int64)
    if chunk + CHUNK < work.end:
        if chunk == work.first:
            asked[_RUN], asked[_END], asked[_RUNS_OF] = 0, work.end, runs_address(args, span)
        asked[_CHUNK_ASKED] = chunk + CHUNK
    else:
        asked[_CHUNK_ASKED] = first_token(args, after[fields.START])
        asked[_RUN], asked[_RUNS_OF] = 0, runs_address(args, after)
        # One span is not after itself.
        asked[_END] = after[fields.START] if after[fields.FIRST_ROW] != span[fields.FIRST_ROW] else 0
    asked[_ASKED] = asked[_CHUNK_ASKED]


def ask_kernel(head_dim: int) -> Any:
    head_bytes = head_dim * 2

    @kernel()
    def ask(args: Any, work: Work, step: int) -> None:
        """Asks for the keys and values of all heads of some tokens, up to the share of a step (from 1 on)."""
        asked = carray(as_pointer(work.asked), (_NUM_ASKED,), np.int64)
        runs, run, token = runs_at(asked[_RUNS_OF]), asked[_RUN], asked[_ASKED]
        size, half = work.num_heads * head_bytes, args[fields.NUM_KV_HEADS] * head_bytes
        last = asked[_CHUNK_ASKED] + CHUNK * step // (work.num_heads * STEPS)
        last = min(last, asked[_END])
        while token < last:
            run = run_of(runs, run, token)
            keys = args[fields.CACHE] + (token + runs[run, 2] - runs[run, 0]) * 2 * half
            keys += work.first_head * head_bytes
            for byte in range(0, size, tiles.LINE):
                prefetch(keys + byte)
            for byte in range(0, size, tiles.LINE):
                prefetch(keys + half + byte)
            token += 1
        asked[_RUN], asked[_ASKED] = run, token

    return ask
