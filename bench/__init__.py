"""The benchmarks: this server beside HTCondor's own, many servers at once, and what QEMU needs beside its guest."""
