"""Care of a store: verification, repair, removal and copies, and attempts at artifacts that exist."""
