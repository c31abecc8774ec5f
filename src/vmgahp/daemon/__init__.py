"""The programs that HTCondor starts: the server, the probe, the kill mode, the image plugin."""
