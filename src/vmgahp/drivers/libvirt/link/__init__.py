"""The connection to libvirt, its errors, and its domains."""
