"""The share of a node that a trial asks Ray for. Imported where Ray Tune is wanted only."""

from __future__ import annotations

from ray import tune
from ray.util.placement_group import PlacementGroup, placement_group

from sweeps.launchers.ray.cluster import session
from sweeps.launchers.ray.share import Share

NODE_ID = "ray.io/node-id"  # a label that Ray gives every node


class Request(tune.PlacementGroupFactory):
    """A share of a node, of any but those that are left out by the time that it is asked for. Those are no part of the
    request itself: Tune lets a trial take the worker of another that asked for the same."""

    def to_placement_group(self) -> PlacementGroup:
        left_out = ",".join(sorted(session().left_out))  # a space would be taken for a part of a name
        selectors = [{NODE_ID: f"!in({left_out})"} if left_out else {}]
        return placement_group(self.bundles, self.strategy, bundle_label_selector=selectors)


def request(share: Share) -> Request:
    """Return the request of a trial that holds ``share``."""
    return Request([{"CPU": share.cpus, "GPU": share.gpus}])
