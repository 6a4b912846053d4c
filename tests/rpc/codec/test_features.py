"""Features on the wire: what they cost, how rows are cut and joined, and peers that know none."""

from __future__ import annotations

from dataclasses import replace

from specray.feature_rows import MAX_FEATURE_BYTES, FeatureRows, max_rows
from specray.rpc.codec import draft as draft_codec
from specray.rpc.codec import target as target_codec
from specray.types import SpeculateItem, TargetReplies, Verdict


def test_features_cost_their_bytes_and_a_few_more() -> None:
    """K + 1 rows of 4096 bfloat16 numbers, there with the verdict and on with the next item."""
    rows = FeatureRows(4000, 9, bytes(9 * 2 * 4096))
    verdict = Verdict("r" * 36, 1000, 4000, 8, 4009)
    item = SpeculateItem("r" * 36, 1000, 4000, tuple(range(4000, 4009)), 8)
    # Tags and numbers: 3 + 2 of first and num_rows, 4 of data, 4 of the rows; and two more for the length of
    # each message around them.
    sizes = [
        len(target_codec.encode_target_replies(TargetReplies((each,), 1)))
        for each in (verdict, replace(verdict, features=rows))
    ]
    assert sizes[1] - sizes[0] == 9 * 2 * 4096 + 5 + 4 + 4 + 2 * 2
    sizes = [
        len(draft_codec.encode_speculate_request([each], ())) for each in (item, replace(item, features=rows))
    ]
    assert sizes[1] - sizes[0] == 9 * 2 * 4096 + 5 + 4 + 4 + 2
    assert max_rows(4096) == 1024 and max_rows(MAX_FEATURE_BYTES) == 1


def test_rows_are_cut_and_joined_by_their_tokens() -> None:
    rows = FeatureRows(4, 3, b"aabbcc")
    assert rows.within(0, 100) is rows and rows.row_bytes == 2 and rows.end == 7
    assert rows.within(5, 6) == FeatureRows(5, 1, b"bb")
    assert rows.within(7, 9) is None and rows.within(0, 4) is None
    first, last = rows.within(4, 5), rows.within(5, 7)
    assert first is not None and last is not None and first.followed_by(last) == rows
