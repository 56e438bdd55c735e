"""A tiny target that chats, and its own rollouts, by the command."""

from pathlib import Path

from typer.testing import CliRunner, Result

from cluster.cli.app import app
from tests.support.tiny_model import make_tiny_model

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def command(line: str) -> Result:
    """What a command does."""
    return CliRunner().invoke(app, line.split())


def done(line: str) -> Result:
    """As `command`, of one that ends well."""
    result = command(line)
    assert result.exit_code == 0, result.output
    return result


def make_tiny_target(folder: Path, *, tokens: int = 1500, logit_scale: float = 1.0) -> tuple[Path, Path]:
    """Target and rollouts of so many answer tokens, in `folder`."""
    model = make_tiny_model(folder / "tiny", vocab=300, logit_scale=logit_scale)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return model, make_rollouts(model, folder / "rollouts", tokens=tokens)


def make_rollouts(model: Path, folder: Path, *, tokens: int, seed: int = 0) -> Path:
    """`folder`, with rollouts of so many answer tokens."""
    line = f"train rollouts --model {model} --out {folder} --batch 8 --user-tokens 12 --seed {seed}"
    done(f"{line} --answer-tokens 16 --tokens {tokens} --threads 1")
    return folder


def training_line(tiny: tuple[Path, Path], options: str, out: Path, features: Path) -> str:
    """One epoch of `outrider train` with `options`, its kind first, on what `make_tiny_target` made."""
    line = f"train {options} --model {tiny[0]} --rollouts {tiny[1]} --out {out} --threads 1 --epochs 1"
    return f"{line} --features {features}"
