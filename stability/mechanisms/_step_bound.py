"""Bound the largest eigenvalue of a consensus operator by its edges' norms, for ``step=bounded``.

With symmetric R_e ⪰ 0 on the directed edges e = (i → j) the operator of g is A = Σ_e (e_i − e_j)(e_i − e_j)ᵀ ⊗ R_e.
Since |u_i − u_j|² ≤ 2(|u_i|² + |u_j|²), uᵀAu ≤ Σ_e ‖R_e‖·|u_i − u_j|² ≤ 2 Σ_i d_i|u_i|² with the degrees
d_i = Σ_{e ∋ i} ‖R_e‖, and λ_max(A) ≤ 2·max_i d_i. A rotation of u at either end of an edge leaves |u_i| as it is: under
RoPE the bound is one of the norm of u ↦ g(u).
"""

from __future__ import annotations

from torch import Tensor

from stability.mechanisms._edge_list import EdgeList
from stability.mechanisms._pairs import Pairs


def largest_eigenvalue(graph: Pairs | EdgeList, norm_HBP: Tensor) -> Tensor:
    """Return 2·max_i d_i for each head and sequence, (H, B, 1): a bound of λ_max(A). Edges with a padded end do not
    count; 0 for a sequence without any.

    Its derivative is that of the node of largest degree; of several, their mean.

    Args:
        graph: the edges.
        norm_HBP: a bound of ‖R_e‖, of unordered pairs of ‖R_ij‖ + ‖R_ji‖.
    """
    return 2 * graph.degrees(norm_HBP).amax(-1, keepdim=True)
