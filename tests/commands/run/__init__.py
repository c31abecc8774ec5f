"""`vmgahp run`."""
