"""How ranks exchange arrays in place of Ascend's collectives: groups, meetings, sends, and a record of the calls."""
