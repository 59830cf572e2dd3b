"""Define a trial's resource request for Ray Tune; import this module only with Ray Tune."""

from __future__ import annotations

from ray import tune
from ray.util.placement_group import PlacementGroup, placement_group

from sweeps.launchers.ray.cluster import session
from sweeps.launchers.ray.share import Share

NODE_ID = "ray.io/node-id"  # Ray labels every node with it


class Request(tune.PlacementGroupFactory):
    """A request for a share of any node, except those left out.

    The nodes left out at placement time count, and are not part of the request's identity: Tune lets a trial reuse the
    worker of an equal request.
    """

    def to_placement_group(self) -> PlacementGroup:
        left_out = ",".join(sorted(session().left_out))  # Ray would parse a space as part of a name
        selectors = [{NODE_ID: f"!in({left_out})"} if left_out else {}]
        return placement_group(self.bundles, self.strategy, bundle_label_selector=selectors)


def request(share: Share) -> Request:
    """Return the request of a trial with ``share``."""
    return Request([{"CPU": share.cpus, "GPU": share.gpus}])
