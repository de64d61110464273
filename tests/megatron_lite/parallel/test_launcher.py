"""Ranks and their launcher: an orphan ends, and one of an earlier start is refused."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading

import pytest
import torch.distributed as dist

from megatron_lite.parallel import launcher
from megatron_lite.parallel.launcher import RankRefused, claim_rank, join_launcher
from tests.cli.conftest import ROOT


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
@pytest.mark.parametrize(
    ("variable", "seconds", "output"), [("TORCHELASTIC_RUN_ID", 60, ""), ("NO_LAUNCHER", 0.2, "survived\n")]
)
def test_rank_dies_with_its_launcher(variable, seconds, output):
    rank = (
        "import time; from megatron_lite.parallel.launcher import end_with_launcher\n"
        f"end_with_launcher(); print('ready', flush=True); time.sleep({seconds}); print('survived')\n"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])"
    environment = {key: value for key, value in os.environ.items() if key != "TORCHELASTIC_RUN_ID"}
    with subprocess.Popen(
        [sys.executable, "-c", parent], cwd=ROOT, env={**environment, variable: "1"}, text=True, stdout=subprocess.PIPE
    ) as agent:
        assert agent.stdout.readline() == "ready\n"
        agent.kill()
        assert agent.stdout.read() == output  # to the end of the rank


@pytest.mark.parametrize("answers", [True, False])
def test_launcher_without_store_is_killed(answers):
    rank = "from megatron_lite.parallel.launcher import end_stranded_launcher; end_stranded_launcher()"
    parent = f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {rank!r}])"
    with socket.socket() as store:
        store.bind(("127.0.0.1", 0))
        if answers:
            store.listen()
        address = f"127.0.0.1:{store.getsockname()[1]}"
        environment = {**os.environ, "TORCHELASTIC_RUN_ID": "1", "METALION_RENDEZVOUS": address}
        done = subprocess.run([sys.executable, "-c", parent], cwd=ROOT, env=environment)
    assert done.returncode == (0 if answers else -signal.SIGKILL)


def test_ranks_of_an_earlier_launcher_are_refused(monkeypatch):
    store = dist.HashStore()
    births = threading.local()
    monkeypatch.setattr(launcher, "_start_time", lambda pid: births.ticks)
    outcomes: dict[str, str] = {}

    def rank(name: str, ticks: int) -> None:
        births.ticks = ticks
        try:
            own = join_launcher(store, 2, 200.0)
            claim_rank(own, int(name[-1]))
            outcomes[name] = "joined"
        except RankRefused as error:
            outcomes[name] = str(error)

    monkeypatch.setattr(launcher.os, "getpid", threading.get_ident)
    threads = [
        threading.Thread(target=rank, args=words) for words in (("stale 0", 100), ("new 0", 200), ("new 1", 200))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes["new 0"] == outcomes["new 1"] == "joined"
    assert "belongs to a launcher that has ended" in outcomes["stale 0"]


def test_taken_rank_is_refused_with_its_holder(monkeypatch):
    store = dist.HashStore()
    claim_rank(store, 1)
    monkeypatch.setattr(launcher.os, "getpid", lambda: 4711)
    claim_rank(store, 0)
    with pytest.raises(RankRefused, match=r"rank 1 is taken by a process that is alive \(.*process \d+\)"):
        claim_rank(store, 1)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    claim_rank(store, 1)
