"""Which tests may run side by side: `make test` has two processes."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start a deployment stay in one process, one after another; so do those of one file."""
    for item in items:
        starts_one = item.get_closest_marker("cluster") or item.path.parts[-3:-1] == (
            "integration",
            "cluster",
        )
        group = "deployments" if starts_one else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
