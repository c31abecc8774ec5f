"""The command line tools: vmgahp doctor, submit, top and the rest."""
