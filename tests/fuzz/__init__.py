"""Bytes of strangers, thrown at whatever reads them: ``scripts/fuzz`` and ``python -m tests.fuzz``.

`targets` has what is fuzzed, `engines` who thinks up the bytes, `corpus` the files to begin with: samples, and every
input that has once broken something.
"""
