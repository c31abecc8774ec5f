"""A VM from its start to its end: the guest, its saves, its pauses, and its usage."""
