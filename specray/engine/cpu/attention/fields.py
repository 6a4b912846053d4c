"""Argument layout of the attention kernel: indexes of its 64-bit arguments, and columns of its tables."""

from __future__ import annotations

# Indexes of the kernel's 64-bit arguments, which are addresses unless noted.
QKV = 0  # num_rows of [num_heads + 2 * num_kv_heads, head_dim], as ``rows`` describes
CACHE = 1  # [num_slots, 2 * num_kv_heads, head_dim]
OUT = 2  # num_rows of [num_heads, head_dim]
NORM = 3  # [num_heads + num_kv_heads, head_dim], of the rows' type or as IS_NORM_WIDE says, or 0
WINDOW = 4  # a number; 0: none
SPANS = 5  # int64 [num_spans, 7]
RUNS = 6  # int64 [., 3]: first position, last + 1, first slot
COS = 7  # float32 [max_model_len, head_dim / 2]
SIN = 8
SCRATCH = 9  # float32, SCRATCH_SIZE for each thread
SCRATCH_SIZE = 10  # a number
NUM_SPANS = 11  # a number
NUM_KV_HEADS = 12  # a number
GROUP_SIZE = 13  # a number
NUM_QUERY_NUMBERS = 14  # a number: float32 of a thread's scratch that hold queries
SCALE_EPS = 15  # two float32, not an address
MASKS = 16  # int64 [., 5]: what rows see, ``visibility.Visibility``
QKV_STEP = 17  # a number: from a row to the next
OUT_STEP = 18  # a number
BLOCK_STEP = 19  # a number: from 32 features of a row to the next, in both
IS_NORM_WIDE = 20  # 1 if NORM is float32, whatever the rows are; else 0
SINKS = 21  # float32 [num_heads], or 0
ROW_SPANS = 22  # int64 [., 7]: of each mask its row as the only one of a chain, or 0
NUM_ARGS = 23

# Columns of a span, the rows of one sequence. FIRST_MASK is the mask of its first row, or -1.
START, FIRST_ROW, NUM_ROWS, FIRST_RUN, NUM_RUNS, COST, FIRST_MASK = range(7)
NUM_COLUMNS = 7
# Columns of a mask.
POSITION, KV_INDEX, PREFIX_LEN, FIRST_INDEX, ANCESTORS = range(5)
NUM_MASK_COLUMNS = 5
