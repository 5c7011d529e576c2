//! Plain fp32 formulas, one per op.
