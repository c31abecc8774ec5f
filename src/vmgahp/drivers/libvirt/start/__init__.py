"""The steps from a job to a domain: its description, its disks, and what the machine gives it."""
