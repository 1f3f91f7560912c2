"""From nothing to something to look at in minutes: two variants compared, or one that talks."""
