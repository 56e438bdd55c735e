"""Medusa heads as they are trained, from rollouts to the artifact and its judging."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from typer.testing import CliRunner

from cluster.cli.app import app
from core.errors import InvalidArgument
from decode.drafters.artifact import read_manifest
from tests.support.made_up_features import HIDDEN, IDS, made_up, target_of
from tests.support.tiny_model import make_tiny_model
from training.batch import make_batch
from training.heads import read_head
from training.medusa import MedusaHeads

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_heads(seed: int = 0) -> MedusaHeads:
    heads = MedusaHeads(HIDDEN, 3, IDS)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return heads


def said(heads: MedusaHeads, final: torch.Tensor, head: int) -> torch.Tensor:
    """Logits of one head behind one state, written out."""
    block = functional.silu(heads.weight[head] @ final + heads.bias[head])
    return target_of().output[list(IDS)] @ (final + block)


@torch.no_grad()
def test_the_loss_of_a_head_is_about_the_token_so_many_places_later() -> None:
    heads, target = make_heads(), target_of()
    found = [made_up(number, length, target) for number, length in ((0, 12), (1, 9))]
    losses = heads.losses(make_batch(found, 100), target)
    assert len(losses) == 3
    for head in range(3):
        terms = []
        for features in found:
            for token in range(4, len(features.rollout.token_ids)):
                scores = target.output @ features.final[token - 1]
                if int(scores.argmax()) in IDS:
                    wanted = torch.softmax(scores[list(IDS)], -1)
                    logits = said(heads, features.final[token - 2 - head], head)
                    terms.append(-(wanted * functional.log_softmax(logits, -1)).sum())
        torch.testing.assert_close(losses[head], torch.stack(terms).mean(), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_drafts_are_the_best_of_each_head_in_order() -> None:
    heads, target = make_heads(), target_of()
    features = made_up(0, 14, target)
    starts = torch.tensor([3, 8])
    ids = heads.draft_ids(make_batch([features], 100), target, (torch.zeros_like(starts), starts), 5)
    for place, start in enumerate(starts.tolist()):
        for head in range(3):
            best = said(heads, features.final[start], head).topk(5).indices
            assert ids[place, head].tolist() == [IDS[int(one)] for one in best]


@torch.no_grad()
def test_untrained_heads_say_what_the_target_says_next() -> None:
    heads, target = MedusaHeads(HIDDEN, 2, IDS), target_of()
    features = made_up(0, 14, target)
    ids = heads.draft_ids(make_batch([features], 100), target, (torch.zeros(1).long(), torch.tensor([6])), 1)
    best = IDS[int((target.output[list(IDS)] @ features.final[6]).argmax())]
    assert ids.tolist() == [[[best], [best]]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Model, rollouts and artifact, by the commands."""
    folder = tmp_path_factory.mktemp("trained")
    model = make_tiny_model(folder / "model", vocab=300)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    command = f"train rollouts --model {model} --out {folder}/rollouts --batch 8 --user-tokens 12"
    command += " --answer-tokens 16 --tokens 700 --threads 1"
    assert CliRunner().invoke(app, command.split()).exit_code == 0
    command = f"train medusa --model {model} --rollouts {folder}/rollouts --out {folder}/heads --heads 3"
    command += f" --draft-vocab 128 --epochs 2 --threads 1 --json --features {folder}/features"
    done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["all"]["chains"] > 0
    return model, folder / "rollouts", folder / "heads"


def test_an_artifact_says_what_it_is_and_how_well_it_does(trained: tuple[Path, Path, Path]) -> None:
    _, _, out = trained
    manifest = read_manifest(out)
    assert (manifest.kind, manifest.hidden_layers) == ("medusa", (2,))
    assert manifest.shape == {"hidden_dim": 64, "num_heads": 3, "draft_vocab": 128}
    assert manifest.recipe["options"] == {"draft_vocab": 128, "num_heads": 3}
    assert len(manifest.acceptance["all"]) == 3
    assert [len(row) for row in manifest.rank_acceptance] == [8, 8, 8]
    assert manifest.rank_acceptance[0][0] == pytest.approx(manifest.acceptance["all"][0], abs=1e-4)
    head, _ = read_head(out)
    assert isinstance(head, MedusaHeads)
    assert head.target_ids.tolist() == sorted(set(head.target_ids.tolist()))


def test_judging_an_artifact_again_gives_what_its_manifest_says(trained: tuple[Path, Path, Path]) -> None:
    model, rollouts, out = trained
    command = ["train", "judge", str(out), "--rollouts", str(rollouts), "--model", str(model)]
    command += ["--threads", "1", "--features", str(out.parent / "features")]
    done = CliRunner().invoke(app, [*command, "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["manifest"] == dict(read_manifest(out).acceptance)
    for name, rates in report["manifest"].items():
        assert report["judged"][name]["rates"] == pytest.approx(rates, abs=0.05)
    told = CliRunner().invoke(app, command)
    assert "manifest" in told.stdout
    assert told.stdout.startswith("all: acceptance length")


def test_what_does_not_fit_is_refused(trained: tuple[Path, Path, Path], tmp_path: Path) -> None:
    _, _, out = trained
    values = json.loads((out / "manifest.json").read_text())
    for changes, told in (
        ({"kind": "odd"}, "kind 'odd'"),
        ({"shape": {}}, "artifact.shape"),
        ({"shape": {**values["shape"], "num_heads": 2}}, "weight is"),
    ):
        folder = tmp_path / told.replace(" ", "")
        folder.mkdir()
        (folder / "manifest.json").write_text(json.dumps({**values, **changes}))
        (folder / "model.safetensors").write_bytes((out / "model.safetensors").read_bytes())
        with pytest.raises(InvalidArgument, match=told):
            read_head(folder)
