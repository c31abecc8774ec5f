"""All targets, by name."""

from tests.fuzz import conversation, files, jobs, people
from tests.fuzz.target import TARGETS, Target

__all__ = ["TARGETS", "Target", "conversation", "files", "jobs", "people"]
