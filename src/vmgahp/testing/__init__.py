"""What tests of a driver need, shipped so that those who write a driver elsewhere can use it. Needs pytest."""
