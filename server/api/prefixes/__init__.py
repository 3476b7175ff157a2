"""Why a prompt found less in the prefix cache than an earlier one has left there."""
