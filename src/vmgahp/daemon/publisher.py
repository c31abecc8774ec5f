"""Reports of changes of a server's VMs to the starter, at moments when it listens.

A starter does not listen while it waits for the answer to anything but a STATUS, nor in the half minute after a START.
So the first STATUS begins the reports, and each STATUS begins one round at most, in a thread of its own with a short
timeout; values that the starter has not taken by then are sent in the next round. Without changes no thread is
started. Figures alone begin a round only as often as a starter passes them on.

Attributes about the end of a VM are sent before the answer to the STATUS that detects it
(`vmgahp.drivers.exit_record`).
"""

from __future__ import annotations

import time

from vmgahp import errors, lifecycle
from vmgahp.daemon.sampler import Outcome
from vmgahp.drivers.base import Logger, Machine
from vmgahp.host import proc, threads
from vmgahp.host.job_user import Identity
from vmgahp.job import chirp, published
from vmgahp.job.published import News
from vmgahp.metrics import Status
from vmgahp.protocol.calls import Call

ROUND_SECONDS = 8.0
"""The timeout of one round in seconds. A starter that waits for the answer to a STATUS does not listen for 3 s."""

FIGURES_SECONDS = 240.0
"""The seconds between two rounds for figures alone: a starter passes them on every STARTER_UPDATE_INTERVAL, 300 s."""

MOST_FAILURES = 5
"""The number of consecutive failed rounds after which there are no more."""

SAVES = (lifecycle.SUSPEND, lifecycle.CHECKPOINT)
CHANGES = (lifecycle.SOFT_SUSPEND, lifecycle.RESUME, *SAVES)


class _Talk:
    """The state of the reports about one VM."""

    def __init__(self, machine: Machine, news: News, directory: str) -> None:
        self.machine = machine
        self.news = news
        self.directory = directory
        self.figures_due = 0.0
        """The time of the next round for figures alone, by the monotonic clock."""
        self.failures = 0
        self.checkpoints = 0


class Publisher:
    """The publisher of the server's own facts about its VMs, which reports changes to their starters."""

    def __init__(self, identity: Identity, log: Logger) -> None:
        self._identity = identity
        self._log = log
        self._talks: dict[int, _Talk] = {}

    def done(self, call: Call, outcome: Outcome, began: float, machine: Machine | None) -> None:
        """Take the outcome of an operation that began at `began`, by the monotonic clock.

        Raises nothing: the client waits for its answer.
        """
        try:
            self._note(call, outcome, began, machine)
        except Exception as error:  # noqa: BLE001 - a bug here must not leave a request unanswered
            self._log(f"{call.operation} is not told the pool: {type(error).__name__}: {error}")

    def _note(self, call: Call, outcome: Outcome, began: float, machine: Machine | None) -> None:
        failed = isinstance(outcome, errors.Fault)
        if call.operation == lifecycle.START and machine is not None and not failed:
            self._add(call, machine)
        talk = self._talks.get(call.vm.id)
        if talk is None:
            return
        if call.operation == lifecycle.STOP and not failed:
            self._talks.pop(call.vm.id, None)
        elif call.operation in CHANGES:
            self._publish_change(talk, call, outcome, began)
        elif isinstance(outcome, Status):
            self._publish_status(talk, call, outcome)

    def _add(self, call: Call, machine: Machine) -> None:
        assert call.job is not None
        news = machine.news
        news.forget(call.job.names("ChirpVM"))
        news.publish(published.STATE, lifecycle.RUNNING)
        talk = self._talks[call.vm.id] = _Talk(machine, news, call.job.working_dir())

        if problem := chirp.missing(talk.directory):
            talk.failures = MOST_FAILURES
            self._complain(talk, problem)

    def _publish_change(self, talk: _Talk, call: Call, outcome: Outcome, began: float) -> None:
        news = talk.news
        if isinstance(outcome, errors.Fault):
            news.publish(published.ERROR, outcome.sentence)
            return
        news.publish(published.STATE, lifecycle.TRANSITIONS[call.state, call.operation])
        if call.operation != lifecycle.CHECKPOINT:
            return
        talk.checkpoints += 1
        news.publish(published.CHECKPOINTS, talk.checkpoints)
        news.publish(published.CHECKPOINT_TIME, int(time.time()))
        news.publish(published.CHECKPOINT_SECONDS, round(time.monotonic() - began, 1))
        news.publish(published.CHECKPOINT_BYTES, talk.machine.saved_bytes() or None)

    def _publish_status(self, talk: _Talk, call: Call, status: Status) -> None:
        if status.state == lifecycle.STOPPED:
            self._talks.pop(call.vm.id, None)  # everything has been reported
            return
        news = talk.news
        if status.state in (lifecycle.RUNNING, lifecycle.SOFT_SUSPENDED):
            news.publish(published.STATE, status.state)
            if status.mac:
                news.publish(published.MAC, status.mac)
            if addresses := talk.machine.addresses() or (status.ip and (status.ip,)):
                news.publish(published.ADDRESSES, ", ".join(addresses))
        now = time.monotonic()
        if talk.failures >= MOST_FAILURES or not (news.is_urgent() or now >= talk.figures_due):
            return
        self._publish_figures(news, talk.machine.process())
        if not news.unsaid():
            return
        if not news.turn.acquire(False):
            return  # the last round still runs
        talk.figures_due = now + FIGURES_SECONDS
        try:
            threads.start("the starter", self._speak, talk)
        except errors.MachineFault as fault:
            news.turn.release()
            self._complain(talk, fault.problem)

    @staticmethod
    def _publish_figures(news: News, process: int) -> None:
        if process and (figures := proc.memory_kib(process)):
            now, most = figures
            news.publish(published.MEMORY, now)
            news.publish(published.MEMORY_PEAK, most)
            news.publish(published.CPU, round(proc.cpu_seconds(process), 1))

    # The thread

    def _speak(self, talk: _Talk) -> None:
        try:
            problem = chirp.tell(talk.news, talk.directory, self._identity, ROUND_SECONDS)
            talk.failures = 0
        except chirp.Unheard as error:
            talk.failures += 1
            problem = str(error)
        except Exception as error:  # noqa: BLE001 - a bug may only cost reports
            talk.failures = MOST_FAILURES
            problem = f"an unexpected {type(error).__name__}: {error}"
        finally:
            talk.news.turn.release()
        self._complain(talk, problem)

    def _complain(self, talk: _Talk, problem: str) -> None:
        if talk.news.is_new(problem):
            self._log(f"{talk.machine.name}: {problem}")
