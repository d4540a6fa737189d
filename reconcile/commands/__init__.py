"""One module for each command: ``add(commands)`` registers its parser and its handler."""
