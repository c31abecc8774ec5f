"""Attacks on the daemon from outside, a surface a module: what was done by whom, and what must happen."""
