"""Tells the starter what is new of a server's VMs, at moments when it listens.

A starter hears nothing while it waits for the answer to anything but a STATUS, nor in the half minute after a START.
So the first STATUS opens the talk, and each STATUS begins one round at most, in a thread that is there for it alone
and gives up soon; what the starter has not taken then is said the next time. Where nothing is new there is no thread.
Figures alone begin a round only as often as a starter passes them on.

What belongs to the end of a VM is told before the STATUS is answered that brings it to light
(`vmgahp.drivers.exit_record`).
"""

import time

from vmgahp import errors, lifecycle
from vmgahp.drivers.base import Logger, Machine
from vmgahp.host import proc, threads
from vmgahp.host.job_user import Identity
from vmgahp.job import published
from vmgahp.job.published import News
from vmgahp.metrics import Status
from vmgahp.protocol.calls import Call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vmgahp.daemon.sampler import Outcome

ROUND_SECONDS = 8.0
"""For all that one round says. A starter that waits for the answer to a STATUS hears nothing for 3 s."""

FIGURES_SECONDS = 240.0
"""Between two rounds for figures alone: a starter passes them on every STARTER_UPDATE_INTERVAL, 300 s."""

MOST_FAILURES = 5
"""Rounds in a row that come to nothing, after which there are no more."""

SAVES = (lifecycle.SUSPEND, lifecycle.CHECKPOINT)
CHANGES = (lifecycle.SOFT_SUSPEND, lifecycle.RESUME, *SAVES)


class _Talk:
    """What is said of one VM."""

    def __init__(self, machine: Machine, news: News, directory: str) -> None:
        self.machine = machine
        self.news = news
        self.directory = directory
        self.figures_due = 0.0
        """By the monotonic clock."""
        self.failures = 0
        self.checkpoints = 0


class Publisher:
    """Publishes what the server itself knows of its VMs, and tells their starters what is new."""

    def __init__(self, identity: Identity, log: Logger) -> None:
        self._identity = identity
        self._log = log
        self._talks: dict[int, _Talk] = {}

    def done(self, call: Call, outcome: "Outcome", began: float, machine: Machine | None) -> None:
        """An operation that began at `began`, by the monotonic clock, has been carried out, or has failed.

        Raises nothing: the client waits for its answer.
        """
        try:
            self._note(call, outcome, began, machine)
        except Exception as error:  # noqa: BLE001 - a bug here must not leave a request unanswered
            self._log(f"{call.operation} is not told the pool: {type(error).__name__}: {error}")

    def _note(self, call: Call, outcome: "Outcome", began: float, machine: Machine | None) -> None:
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
        from vmgahp.job import chirp  # of no use before there is a VM

        if problem := chirp.missing(talk.directory):
            talk.failures = MOST_FAILURES
            self._complain(talk, problem)

    def _publish_change(self, talk: _Talk, call: Call, outcome: "Outcome", began: float) -> None:
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
            self._talks.pop(call.vm.id, None)  # all is said
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
            return  # the last one goes on
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
        from vmgahp.job import chirp

        try:
            problem = chirp.tell(talk.news, talk.directory, self._identity, ROUND_SECONDS)
            talk.failures = 0
        except chirp.Unheard as error:
            talk.failures += 1
            problem = str(error)
        except Exception as error:  # noqa: BLE001 - a bug costs news and nothing else
            talk.failures = MOST_FAILURES
            problem = f"an unexpected {type(error).__name__}: {error}"
        finally:
            talk.news.turn.release()
        self._complain(talk, problem)

    def _complain(self, talk: _Talk, problem: str) -> None:
        if talk.news.is_new(problem):
            self._log(f"{talk.machine.name}: {problem}")
