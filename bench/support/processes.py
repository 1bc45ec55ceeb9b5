"""Processes under measurement, and what they and the machine spend."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import psutil

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Part:
    """A child process that reports one value (its port) when it is ready."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        ours, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.Process(target=target, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()
        self.port: int = ours.recv()

    def cpu_s(self) -> float:
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system

    def stop(self) -> None:
        self.process.terminate()
        self.process.join(10)


def machine_busy_s() -> float:
    """CPU seconds of the whole machine that were not idle: kernel workers and interrupts included."""
    with open("/proc/stat") as file:
        fields = [int(value) for value in file.readline().split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, _steal = fields
    return (user + nice + system + irq + softirq) * _TICK_S
