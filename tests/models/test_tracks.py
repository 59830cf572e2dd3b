"""Source and context tracks as a model reads them, against loops."""

from __future__ import annotations

import pytest
import torch

from stability.models.tracks import SummedEmbedding, Track, TrackEmbedding, TrackInputs


@pytest.mark.parametrize("seed", range(3))
def test_the_domains_of_a_residue_are_the_mean_of_a_loop_over_those_that_may_be_read(seed):
    generator = torch.Generator().manual_seed(seed)
    tokens_BJK = torch.randint(9, (4, 13, 6), generator=generator)
    mask_BJK = torch.rand(4, 13, 6, generator=generator) < torch.rand(4, 13, 1, generator=generator)
    mask_BJK[0], mask_BJK[1] = False, True
    domains = TrackEmbedding(9, 5).double()
    table = domains.table.weight.tolist()
    found = domains(Track(tokens_BJK, mask_BJK))
    for row in range(4):
        for place in range(13):
            read = [
                table[token]
                for token, may_be in zip(tokens_BJK[row, place].tolist(), mask_BJK[row, place].tolist(), strict=True)
                if may_be
            ]
            expected = [sum(column) / len(read) for column in zip(*read, strict=True)] if read else [0.0] * 5
            assert found[row, place].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-14)
    assert Track(tokens_BJK, mask_BJK).entries_BJ.tolist() == [
        [any(place) for place in row] for row in mask_BJK.tolist()
    ]


def test_a_domain_that_may_not_be_read_has_no_gradient():
    domains = TrackEmbedding(4, 3)
    domains(Track(torch.tensor([[[1, 2]]]), torch.tensor([[[True, False]]]))).sum().backward()
    assert domains.table.weight.grad is not None and domains.table.weight.grad.abs().sum(1).tolist() == [
        0.0,
        3.0,
        0.0,
        0.0,
    ]


def test_sources_are_summed_position_by_position():
    generator = torch.Generator().manual_seed(0)
    embed = SummedEmbedding([6, 7, 8], 4).double()
    tracks = tuple(torch.randint(size, (3, 10), generator=generator) for size in (6, 7, 8))
    tables = [track.weight.tolist() for track in embed.tracks]  # type: ignore[union-attr]
    found = embed(TrackInputs(tracks))
    for row in range(3):
        for place in range(10):
            parts = [table[tokens[row, place]] for table, tokens in zip(tables, tracks, strict=True)]
            assert found[row, place].tolist() == pytest.approx(
                [sum(column) for column in zip(*parts, strict=True)], rel=1e-12, abs=1e-14
            )
