"""`fusepatch run`: what a script sees is what Python itself would show it, and its models are accelerated."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PACKAGE_ROOT = str(Path(__file__).parents[2] / "accelerate")

# Runs a tiny gated MLP once, and says how many calls ran natively in this process.
TRAIN = """
def train():
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP
    import fusepatch

    mlp = LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=96))
    mlp(torch.randn(2, 64)).sum().backward()
    return fusepatch.status().native_calls()
"""


def python(folder: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """`python arguments...` in `folder`, with this checkout's fusepatch and its reference backend."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("FUSEPATCH", "PYTHON"))}
    env |= {"PYTHONPATH": PACKAGE_ROOT, "FUSEPATCH_GATED_MLP_BACKEND": "reference", "OMP_NUM_THREADS": "1", **environ}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240)


def run(folder: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return python(folder, "-m", "fusepatch", "run", *arguments, **environ)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))


# ------------------------------------------------------------------------------------------------- as Python runs it

SHOW = """
import sys

main = sys.modules["__main__"]
assert vars(main) is globals()
for name in sorted(vars(main)):
    if name.startswith("__"):
        value = vars(main)[name]
        print(name, type(value).__name__ if name in ("__builtins__", "__loader__") else getattr(value, "name", value))
print(sys.argv)
print(sys.path[0])
"""


@pytest.mark.parametrize("script", ["show.py", "./show.py", "sub/show.py", "sub/../show.py", "link.py"])
def test_script_sees_what_python_shows(tmp_path: Path, script: str) -> None:
    for path in ("show.py", "sub/show.py", "elsewhere/linked.py"):
        write(tmp_path / path, SHOW)
    (tmp_path / "link.py").symlink_to("elsewhere/linked.py")
    expected = python(tmp_path, script, "a", "--strict", "-m", "--", "--ops")
    actual = run(tmp_path, script, "a", "--strict", "-m", "--", "--ops")
    assert expected.returncode == actual.returncode == 0, actual.stderr
    assert actual.stdout == expected.stdout


@pytest.mark.parametrize("module", ["show", "pack", "pack.inner"])
def test_module_sees_what_python_shows(tmp_path: Path, module: str) -> None:
    for path in ("show.py", "pack/__main__.py", "pack/inner.py"):
        write(tmp_path / path, SHOW)
    write(tmp_path / "pack/__init__.py", "import transformers")
    expected = python(tmp_path, "-m", module, "a", "--strict")
    actual = run(tmp_path, "-m", module, "a", "--strict")
    assert expected.returncode == actual.returncode == 0, actual.stderr
    assert actual.stdout == expected.stdout


def test_safe_path_is_left_alone(tmp_path: Path) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("-P came with Python 3.11")
    write(tmp_path / "sub/show.py", "import sys; print(sys.path[0])")
    expected = python(tmp_path, "-P", "sub/show.py")
    actual = python(tmp_path, "-P", "-m", "fusepatch", "run", "sub/show.py")
    assert actual.stdout == expected.stdout


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("pass", 0),
        ("import sys; sys.exit()", 0),
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit('goodbye')", 1),
        ("import argparse; argparse.ArgumentParser(prog='theirs').parse_args(['--nonsense'])", 2),
        ("import os; os._exit(9)", 9),
        ("def f():\n    raise ValueError('mine')\n\nf()", 1),
        ("try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError('k') from error", 1),
        ("x = = 1", 1),
        ("import broken", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        # Handled in any case: a shell starts what it puts into the background with the signal ignored.
        (
            "import os, signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)",
            -signal.SIGINT,
        ),
    ],
)
def test_exit_code_and_stderr_are_those_of_python(tmp_path: Path, body: str, code: int) -> None:
    write(tmp_path / "script.py", body)
    write(tmp_path / "broken.py", "y = = 2")
    expected, actual = python(tmp_path, "script.py"), run(tmp_path, "script.py")
    assert expected.returncode == actual.returncode == code
    assert actual.stderr == expected.stderr  # no frame of ours in a traceback
    assert actual.stdout == ""


def test_module_exceptions_pass_through(tmp_path: Path) -> None:
    write(tmp_path / "pack/__init__.py", "import not_installed_anywhere")
    write(tmp_path / "pack/inner.py", "")
    done = run(tmp_path, "-m", "pack.inner")
    assert done.returncode == 1
    assert "ModuleNotFoundError: No module named 'not_installed_anywhere'" in done.stderr


def test_a_script_keeps_its_own_excepthook(tmp_path: Path) -> None:
    write(tmp_path / "script.py", "import sys\nsys.excepthook = lambda *a: print('hook', a[0].__name__)\nraise OSError")
    done = run(tmp_path, "script.py")
    assert (done.returncode, done.stdout, done.stderr) == (1, "hook OSError\n", "")


def test_main_stays_for_threads_and_exit_handlers(tmp_path: Path) -> None:
    body = """
        import atexit, pickle, sys, threading, time

        class Mine:
            pass

        def late(who):
            time.sleep(0.5 if who == "thread" else 0)
            assert sys.modules["__main__"].Mine is Mine
            print(who, len(pickle.dumps(Mine())) > 0)

        atexit.register(late, "exit")
        threading.Thread(target=late, args=("thread",)).start()
    """
    write(tmp_path / "script.py", body)
    done = run(tmp_path, "script.py")
    assert (done.returncode, done.stdout) == (0, "thread True\nexit True\n"), done.stderr


# ------------------------------------------------------------------------------------------------------- accelerated


def test_script_is_accelerated_and_reported_once(tmp_path: Path) -> None:
    write(tmp_path / "train.py", TRAIN + "print(train())")
    done = run(tmp_path, "--ops", "gated_mlp", "--strict", "train.py")
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert done.stderr.count("fusepatch: gated_mlp/transformers: 1 class patched; fused 1") == 1
    assert len(done.stderr.splitlines()) == 1


def test_strict_raises_in_the_script(tmp_path: Path) -> None:
    write(tmp_path / "train.py", TRAIN + "print(train())")
    done = run(tmp_path, "--strict", "train.py", FUSEPATCH_GATED_MLP_BACKEND="auto")
    assert done.returncode == 1
    assert "DeclinedError" in done.stderr


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_children_of_multiprocessing_are_accelerated(tmp_path: Path, method: str) -> None:
    if method != "spawn" and sys.platform == "win32":
        pytest.skip("no fork")
    body = f"""
        import multiprocessing, os

        def work(number):
            return number, train()

        if __name__ == "__main__":
            os.chdir("/")  # the child must not depend on where it starts
            context = multiprocessing.get_context({method!r})
            with context.Pool(2) as pool:
                print(pool.map(work, [1, 2], chunksize=1))
    """
    write(tmp_path / "script.py", TRAIN + textwrap.dedent(body))
    # A relative entry of PYTHONPATH is worth nothing to a child that starts elsewhere.
    done = run(
        tmp_path,
        "--ops=gated_mlp",
        "script.py",
        FUSEPATCH_LOG="off",
        PYTHONPATH=os.path.relpath(PACKAGE_ROOT, tmp_path),
    )
    assert done.returncode == 0, done.stderr
    counts = eval(done.stdout)
    assert [number for number, _ in counts] == [1, 2]
    assert all(native >= 1 for _, native in counts), counts


def test_children_of_a_module_work(tmp_path: Path) -> None:
    body = """
        import torch.multiprocessing as mp

        def work(rank):
            print("native", train(), flush=True)

        if __name__ == "__main__":
            mp.spawn(work, nprocs=1)
    """
    write(tmp_path / "pack/__init__.py", "")
    write(tmp_path / "pack/script.py", TRAIN + textwrap.dedent(body))
    done = run(tmp_path, "-m", "pack.script", FUSEPATCH_LOG="off")
    assert (done.returncode, done.stdout) == (0, "native 1\n"), done.stderr


def test_a_child_starts_though_it_cannot_be_accelerated(tmp_path: Path) -> None:
    body = """
        import multiprocessing, os

        def work():
            import fusepatch
            print("child", fusepatch.status().native_calls())

        if __name__ == "__main__":
            os.environ["FUSEPATCH_NONSENSE"] = "1"
            child = multiprocessing.get_context("spawn").Process(target=work)
            child.start()
            child.join()
            print(child.exitcode)
    """
    write(tmp_path / "script.py", body)
    done = run(tmp_path, "script.py")
    assert (done.returncode, done.stdout) == (0, "child 0\n0\n"), done.stderr
    assert "a spawned process runs unaccelerated: unknown environment variable FUSEPATCH_NONSENSE" in done.stderr


def test_under_torchrun(tmp_path: Path) -> None:
    # No tensor goes through a collective: gloo's thread may drop it while Python shuts down, which ends the process
    # with SIGABRT (torch 2.13, without fusepatch too: 8 of 36 launches on a loaded machine).
    body = """
        import sys
        from pathlib import Path
        import torch.distributed as dist

        dist.init_process_group("gloo")
        said = f"{dist.get_world_size()} {train()} {sys.argv[1:]}"
        Path(f"rank{dist.get_rank()}").write_text(said)
        dist.barrier()
        dist.destroy_process_group()
    """
    write(tmp_path / "train.py", TRAIN + textwrap.dedent(body))
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--rdzv-backend", "c10d")
    done = python(
        tmp_path, *launch, "--rdzv-endpoint", "localhost:0", "-m", "fusepatch", "run", "train.py", "--lr", "1"
    )
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["2 1 ['--lr', '1']"] * 2
    assert done.stderr.count("fusepatch: gated_mlp/transformers") == 1  # rank 0 alone reports


# ------------------------------------------------------------------------------------------------------- bad inputs


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nope.py"], "there is no script nope.py"),
        (["sub"], "sub is a directory, not a script"),
        (["-m", "nope"], "there is no module named nope"),
        (["-m", "nope.inner"], "there is no module named nope.inner"),
        (["-m", "sub.nope"], "there is no module named sub.nope"),
        (["-m", "plain.inner"], "there is no module named plain.inner"),
        (["-m", "sub"], "sub is a package without a __main__ module, and can't be run"),
        (["-m", "math"], "math has no Python code to run"),
        (["-m", ".script"], "there is no module named .script"),
        (["--ops", "none", "script.py"], "unknown op 'none'; ops: gated_mlp, engram_gate, kda, gated_delta_rule"),
        (["--ops=gated_mlp,", "script.py"], "unknown op ''; ops: gated_mlp, engram_gate, kda, gated_delta_rule"),
        ([], "name a script to run, or a module with -m MODULE"),
        (["--strict"], "name a script to run, or a module with -m MODULE"),
    ],
)
def test_bad_inputs(tmp_path: Path, arguments: list[str], says: str) -> None:
    write(tmp_path / "script.py", "print('ran')")
    write(tmp_path / "sub/__init__.py", "")
    write(tmp_path / "plain.py", "")
    done = run(tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"fusepatch: {says}\n"


def test_bad_environment(tmp_path: Path) -> None:
    write(tmp_path / "script.py", "print('ran')")
    done = run(tmp_path, "script.py", FUSEPATCH_GATED_MLP="yes")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "fusepatch: FUSEPATCH_GATED_MLP='yes' is not valid: it takes 0, 1.\n"


def test_a_worker_does_not_report_what_it_was_not_asked_to_run(tmp_path: Path) -> None:
    write(
        tmp_path / "script.py",
        TRAIN
        + """
def work():
    import fusepatch
    assert any(target.state == "patched" or target.state == "pending" for target in fusepatch.status().targets)

if __name__ == "__main__":
    import multiprocessing
    child = multiprocessing.get_context("spawn").Process(target=work)
    child.start()
    child.join()
    assert child.exitcode == 0
    if __import__("os").environ.get("NATIVE"):
        train()
""",
    )
    complaint = "gated_mlp was asked for by name and never ran natively"
    done = run(tmp_path, "--ops", "gated_mlp", "script.py", NATIVE="1")
    assert done.returncode == 0, done.stderr
    assert complaint not in done.stderr
    assert run(tmp_path, "--ops", "gated_mlp", "script.py").stderr.count(complaint) == 1
