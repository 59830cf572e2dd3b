"""Choose paddings and block sizes for a connection with several streams."""

from __future__ import annotations

from dataclasses import dataclass

import triton


@dataclass(frozen=True)
class Shape:
    """A connection's sizes, paddings and blocks.

    T tokens, N streams, C channels and R mixing logits (0: hyper-connections). Blocks fit 128 threads and their
    registers; they do not depend on the device, and neither do results.
    """

    tokens: int
    streams: int
    width: int
    options: int = 0
    lite: bool = False

    @property
    def outputs(self) -> int:
        """The number of logits per token, or per stream (hyper-connections)."""
        return 2 * self.streams + self.options if self.options else self.streams + 2

    @property
    def padded_streams(self) -> int:
        return max(4, triton.next_power_of_2(self.streams))

    @property
    def padded_outputs(self) -> int:
        return max(16, triton.next_power_of_2(self.outputs))

    @property
    def padded_options(self) -> int:
        return max(16, triton.next_power_of_2(self.options)) if self.lite else self.padded_streams**2

    @property
    def block_tokens(self) -> int:
        """The tokens per reading program; in hyper-connections each stream is a row."""
        return 32 if self.options else 32 // self.padded_streams

    @property
    def read_programs(self) -> int:
        return triton.cdiv(self.tokens, self.block_tokens)

    @property
    def block_width(self) -> int:
        return min(128 // self.padded_streams, max(16, triton.next_power_of_2(self.width)))

    @property
    def join_width(self) -> int:
        """The channels of one token per joining warp, whose threads hold all streams of some channels."""
        return min(1024 // self.padded_streams, triton.next_power_of_2(self.width))

    @property
    def column_programs(self) -> int:
        """The number of channel blocks over all streams."""
        return self.streams * triton.cdiv(self.width, self.block_width)

    @property
    def parts(self) -> int:
        """The number of token parts with separate weight gradients.

        Enough programs for a GPU, without partial gradients larger than X.
        """
        return max(1, min(triton.cdiv(self.tokens, 256), triton.cdiv(1024, self.column_programs)))

    @property
    def part_tokens(self) -> int:
        return triton.cdiv(self.tokens, self.parts)
