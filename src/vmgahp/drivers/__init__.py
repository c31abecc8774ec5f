"""The drivers: `base` has the contract, every other module is one driver and imports no other."""
