"""The commands, one file per command or group. They parse arguments, call the library and print; see `gptkit.cli`."""
