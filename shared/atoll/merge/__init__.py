"""From encoded contributions to the next version of a fragment: weights, fold, correction, outer optimizer."""
