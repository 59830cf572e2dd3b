"""Trained models as folders of their own: written in few bits, validated, and read without the run."""

from stability.deployed.folder import Deployed, load

__all__ = ["Deployed", "load"]
