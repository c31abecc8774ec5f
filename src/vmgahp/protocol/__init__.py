"""The GAHP: bytes to commands to replies."""
