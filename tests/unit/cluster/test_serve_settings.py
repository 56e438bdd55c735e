"""From the command line to settings, secrets included."""

import socket
from pathlib import Path

import pytest

from cluster.cli.serve import parse_overrides
from cluster.serve import complete_secrets
from cluster.specs import worker_specs
from core.errors import FailedPrecondition, InvalidArgument
from core.grpc_server import require_free
from core.metrics import MetricsServer
from core.settings import ServeSettings, TelemetrySettings, load_settings


def test_values_are_toml_where_they_parse_and_text_elsewhere() -> None:
    pairs = [
        "engine.num_blocks=64",
        "engine.dtype=float32",
        "grpc.keepalive_time_s=2.5",
        "decode_worker.drafters.ngram=none",
    ]
    pairs += ["decode_worker.drafters.ngram=none", "engine.hidden_layers=[1, 2]", "model=/a b/c=d"]
    settings = load_settings(None, parse_overrides(pairs))
    assert settings.engine.num_blocks == 64
    assert settings.engine.dtype == "float32"
    assert settings.grpc.keepalive_time_s == 2.5
    assert settings.decode_worker.drafters.ngram is None
    assert settings.engine.hidden_layers == (1, 2)
    assert settings.model == "/a b/c=d"


@pytest.mark.parametrize("pair", ["engine.num_blocks", "=3"])
def test_a_pair_without_key_or_value_is_refused(pair: str) -> None:
    with pytest.raises(InvalidArgument, match="key=value"):
        parse_overrides([pair])


def test_chunks_that_fit_in_no_message_are_refused_by_their_name() -> None:
    with pytest.raises(InvalidArgument, match=r"grpc\.max_message_bytes") as refused:
        load_settings(None, {"handoff.chunk_bytes": 8 * 2**20})
    assert refused.value.field == "handoff.chunk_bytes"
    load_settings(None, {"handoff.chunk_bytes": 8 * 2**20, "grpc.max_message_bytes": 9 * 2**20})


def test_missing_ticket_keys_are_drawn_anew_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_TICKET_KEYS", raising=False)
    first, second = (complete_secrets(ServeSettings.model_validate({})).security for _ in range(2))
    assert first.ticket_keys != second.ticket_keys
    assert len(bytes.fromhex(first.ticket_keys[0])) == 32
    assert first.cache_salt_secret != second.cache_salt_secret
    assert first.bearer_token is None


def test_configured_secrets_come_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_TICKET_KEYS", "bb" * 16)
    monkeypatch.setenv("OUTRIDER_TOKEN", "from outside")
    given = complete_secrets(ServeSettings.model_validate({"security": {"ticket_keys": ["aa" * 16]}}))
    assert given.security.ticket_keys == ("aa" * 16,)
    assert given.security.bearer_token == "from outside"
    assert complete_secrets(ServeSettings.model_validate({})).security.ticket_keys == ("bb" * 16,)


def test_secrets_are_not_shown_when_settings_are_printed() -> None:
    settings = complete_secrets(ServeSettings.model_validate({"security": {"bearer_token": "hush"}}))
    assert settings.security.ticket_keys[0] not in repr(settings)
    assert "hush" not in repr(settings)


def test_workers_of_a_deployment_listen_on_loopback_and_the_router_comes_last() -> None:
    settings = ServeSettings.model_validate({"prefill": 1, "decode": 2, "listen": "127.0.0.1:7"})
    specs = worker_specs(settings, "unix:///redis", "127.0.0.1")
    assert [spec.worker_id for spec in specs] == ["prefill-0", "decode-0", "decode-1", "router-0"]
    assert [spec.listen for spec in specs] == ["127.0.0.1:0"] * 3 + ["127.0.0.1:7"]
    assert {spec.listen for spec in worker_specs(settings, "unix:///redis", None)[:-1]} == {None}


def test_a_metrics_port_is_the_routers_and_the_workers_of_its_host_take_the_next_ones() -> None:
    settings = ServeSettings.model_validate({"decode": 2, "telemetry": {"metrics_port": 9400}})

    def ports(host: str | None, chosen: ServeSettings = settings) -> list[int | None]:
        return [spec.settings.telemetry.metrics_port for spec in worker_specs(chosen, "unix:///redis", host)]

    assert ports("127.0.0.1") == [9401, 9402, 9403, 9400]
    assert ports(None) == [9400] * 4
    assert ports("127.0.0.1", ServeSettings()) == [0] * 3
    off = ServeSettings.model_validate({"telemetry": {"metrics_port": None}})
    assert ports("127.0.0.1", off) == [None] * 3


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("telemetry.metrics_prt", "did you mean metrics_port"),
        ("decode_worker.drafters.ngrm", "did you mean ngram"),
        ("decode_worker.drafters.ngram.zzz", "known: min_match"),
        ("foo", "known: model"),
    ],
)
def test_a_setting_that_is_none_is_named_with_its_likeliest_mend(key: str, told: str) -> None:
    with pytest.raises(InvalidArgument, match=told) as refused:
        load_settings(None, {key: 1})
    assert refused.value.field == key


def test_a_settings_file_that_cannot_be_read_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as missing:
        load_settings(tmp_path / "none.toml", {})
    assert missing.value.message == f"config: {tmp_path / 'none.toml'}: No such file or directory"
    broken = tmp_path / "broken.toml"
    broken.write_bytes(b"\xff = 3")
    with pytest.raises(InvalidArgument, match=r"broken\.toml is no TOML"):
        load_settings(broken, {})


def test_a_port_in_use_is_refused_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(FailedPrecondition, match="in use") as refused:
            require_free(address)
    assert refused.value.field == "listen"
    require_free(address)


def test_a_metrics_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(FailedPrecondition, match=str(port)) as refused:
            MetricsServer(TelemetrySettings(metrics_port=port), "decode", "decode-0")
    assert refused.value.field == "telemetry.metrics_port"


def test_a_key_below_a_value_is_refused_by_name(tmp_path: Path) -> None:
    config = tmp_path / "serve.toml"
    config.write_text("prefill = 2\n")
    with pytest.raises(InvalidArgument, match=r"prefill is a value \(2\), not a section") as refused:
        load_settings(config, {"prefill.chunk_tokens": 64})
    assert refused.value.field == "prefill.chunk_tokens"


def test_a_wrong_key_of_a_named_version_is_refused_by_name() -> None:
    versions = {"eagle3@next": {"artifct": "x"}}
    with pytest.raises(InvalidArgument, match="did you mean artifact"):
        load_settings(None, {"decode_worker.drafters.versions": versions})
