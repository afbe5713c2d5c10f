"""The command line and the composition root: settings are read here, roles are started here, nobody imports this."""
