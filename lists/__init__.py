"""The shipped list sets, one TOML file each; installed as the data package `autoamp.lists`."""
