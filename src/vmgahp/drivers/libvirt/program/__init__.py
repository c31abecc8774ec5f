"""The program of a job in its guest: the drive with it, and the monitor that follows it."""
