"""Rooflines of expert matmuls: why equal FLOPs are not equal time (report, appendix A.8 and figure 2)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Pair:
    """A bfloat16 FFN on T tokens: up and gate fused, then down; forward, each matmul reading and writing memory.

    Attributes:
        top_k: Experts of a token, K. The dense FFN of equal FLOPs has hidden width K x h.
        width: Model width d.
        hidden: Hidden width h of one expert.
        experts: Experts E, all in use and balanced; None for the dense FFN.
    """

    top_k: int
    width: int
    hidden: int
    experts: int | None = None

    def flops(self, tokens: float) -> tuple[float, float]:
        """FLOPs of up and of down (equation 92), dense and MoE alike."""
        one = 2.0 * tokens * self.top_k * self.width * self.hidden
        return 2 * one, one

    def traffic(self, tokens: float) -> dict[str, float]:
        """Bytes by kind (table 43)."""
        rows = tokens * (self.top_k if self.experts else 1)
        weights = (self.experts or self.top_k) * self.width * self.hidden
        return {
            "weight reads": 6.0 * weights,
            "input reads": 2.0 * rows * self.width,
            "output writes": 2.0 * rows * self.width,
            "hidden writes and reads": 6.0 * tokens * self.top_k * self.hidden,
        }

    def bytes(self, tokens: float) -> tuple[float, float]:
        """Bytes of up and of down (equation 93)."""
        rows = tokens * (self.top_k if self.experts else 1)
        matrix = (self.experts or self.top_k) * self.width * self.hidden
        inner = tokens * self.top_k * self.hidden
        return 2.0 * (rows * self.width + 2 * matrix + 2 * inner), 2.0 * (inner + matrix + rows * self.width)

    def ceiling(self, tokens: float, balance: float) -> float:
        """Attainable part of peak (equation 94), for a machine of `balance` FLOP per byte."""
        pairs = zip(self.flops(tokens), self.bytes(tokens), strict=True)
        return sum(self.flops(tokens)) / sum(max(flops, balance * size) for flops, size in pairs)

    def tokens_to_ceiling(self, balance: float) -> float:
        """Tokens from which both matmuls are bound by compute: where F = balance x Q for the later one.

        Both sides are linear in T, so this is exact; infinite if compute never binds.
        """
        found = 0.0
        for index in (0, 1):
            per_token = self.flops(1)[index] - balance * (self.bytes(1)[index] - self.bytes(0)[index])
            found = max(found, balance * self.bytes(0)[index] / per_token if per_token > 0 else float("inf"))
        return found


def intensity(rows: float, width_in: int, width_out: int) -> float:
    """FLOP per byte of one bfloat16 projection of `rows` rows (equation 90)."""
    moved = rows * width_in + width_in * width_out + rows * width_out
    return rows * width_in * width_out / moved
