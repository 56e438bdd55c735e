"""`outrider plan-tree`: which draft trees pay, for measured acceptance and times."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli import options as o
from core.errors import ServiceError

if TYPE_CHECKING:
    from decode.control.tree_plan import PlannedTree

Measurements = Annotated[
    Path, typer.Argument(exists=True, dir_okay=False, help="JSON; see above for what it holds.")
]


def plan_tree_command(
    measurements: Measurements,
    max_nodes: Annotated[int, typer.Option(min=1, max=256, help="Largest tree.")] = 64,
    max_depth: Annotated[int, typer.Option(min=1, max=64, help="Most levels.")] = 8,
    batch: Annotated[int, typer.Option(min=1, help="Requests that draft such a tree in one step.")] = 1,
    as_json: o.Json = False,
) -> None:
    """The fastest draft tree for every number of nodes, and the one that emits most tokens a second.

    The file holds a JSON object:

    "rank_rates": [0.72, 0.31, 0.2], the probability that the k-th child of a node is the target's token, given that
    its earlier siblings were not; or a list of such lists, one a depth.

    "step_seconds": {"1": 0.0241, "8": 0.0268, "64": 0.0913}, of one target step by its rows; absent: all alike.

    "draft_level_seconds": 0.0042, of one level of the draft; absent: 0.
    """
    from decode.control.tree_measurements import read_measurements
    from decode.control.tree_plan import TreePlan

    try:
        measured = read_measurements(measurements, "measurements")
    except ServiceError as error:
        o.fail(error)
    plan = TreePlan(measured.rank_rates, max_nodes, max_depth)
    costs = measured.costs(batch * (1 + max_nodes), batch)
    trees = [plan.best_for(nodes, max_depth, costs) for nodes in range(max_nodes + 1)]
    best = plan.best(max_nodes, max_depth, costs)
    if as_json:
        print(json.dumps({"best": _entry(best), "trees": [_entry(tree) for tree in trees]}))
        return
    plain = trees[0].tokens_per_second
    print("nodes  depth  tokens/step  ms/step  speedup  children, level by level")
    for tree in trees:
        print(_line(tree, plain, tree.shape == best.shape))


def _entry(tree: "PlannedTree") -> dict[str, object]:
    return {
        "nodes": tree.shape.num_nodes,
        "depth": tree.shape.depth,
        "tokens_per_step": tree.expected_tokens,
        "seconds_per_step": tree.seconds,
        "tokens_per_second": tree.tokens_per_second if tree.seconds > 0.0 else None,
        "children": tree.shape.counts,
    }


def _line(tree: "PlannedTree", plain: float, is_best: bool) -> str:
    shape = tree.shape
    counts = " ".join(str(count) for count in shape.counts)
    mark = " *" if is_best else ""
    return (
        f"{shape.num_nodes:5}  {shape.depth:5}  {tree.expected_tokens:11.3f}  {1000 * tree.seconds:7.2f}  "
        f"{tree.tokens_per_second / plain:7.3f}  {counts}{mark}"
    )
