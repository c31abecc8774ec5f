"""libvirt's domain XML: built, verified, restored, and read from a job."""
