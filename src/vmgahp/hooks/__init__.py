"""The administrator's programs: scripts, policies, stylesheets, MAC addresses."""
