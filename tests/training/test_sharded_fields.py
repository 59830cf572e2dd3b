"""A model whose matrices are read at more than one place is shared out as any other: each weight lies on a device once."""

from __future__ import annotations

import pytest

from tests.training.test_sharded import SGD, assert_as_right, by_hand, run, weights

SIZE = {"name": "tiny", "layers": 2, "width": 16, "heads": 2, "positions": 16}


@pytest.mark.slow  # two processes that import torch; test_sharded.py keeps a plain run in the fast suite
@pytest.mark.parametrize("chunk", [None, 20])
def test_a_tied_head_and_looped_blocks_over_two_shards(lab, tmp_path, chunk):
    spec = lab.spec(
        batch=4,
        microbatch=2,
        model=SIZE | {"loops": 2, "tied": True, "embedding_std": 0.1, "embedding_width": 6},
        mechanism={"name": "sa", "temperature": "learned"},
        objective={"name": "mlm", "loss_chunk": chunk},
        **SGD,
    )
    alone, sharded = run(lab, spec, tmp_path / "alone"), run(lab, spec, tmp_path / "sharded", shards=2)
    assert_as_right(weights(sharded), weights(alone), by_hand(lab, spec))
