"""The processes of a run: how they are launched, which devices they have, how they log and exit."""
