from tests import shape_checks  # noqa: F401 - before anything of ours is imported, whose functions it sees
