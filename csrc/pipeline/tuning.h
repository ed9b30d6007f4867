// All numbers of planning that were tuned and not derived: of the planner of `auto`, and of the calibrations that fill its
// costs. How many of those are kept says ppsd_rt/planning/planner.py. docs/design/planner.md says what each number is worth
// at half and at double of it.
#pragma once

namespace ppsd {

struct Tuning {
  // -- acceptance --
  double prior_weight = 4.0;      // verdicts that the head file's acceptance counts as
  double copies = 2.0;            // what a copy must promise over the price of its row: its chance is less well known

  // -- corrections of predicted seconds --
  double recent = 0.2;            // share of a new round in the recent ratio of measured to predicted seconds
  double bias_step = 0.04;        // share of a new comparison in a bias, at least
  double costs_weight = 4.0;      // comparisons that the costs count as, while there are few
  int same_moment = 12;           // rounds after a change of kind in which the pace is still the one before it
  double held_up = 1.6;           // most of a round's seconds over the usual ones: a lost core says little of the next round

  // -- probes --
  double probing = 0.015;         // share of the time that drafts may cost that are only tried
  int probe_rounds = 2;           // one after the other; the first one is dearer than those after it, and tells nothing
  int last_probe = 64;            // plain rounds before a draft is tried, at most, if a draft is cheap
  int plain_probe = 48;           // drafting rounds before a plain one,
  double drift = 1.15;            // or `same_moment` of them, if they take so many times longer or shorter than after the last

  // -- the account --
  double allowance = 0.02;        // share of an answer's plain steps that its drafts may lose
  int allowed_ahead = 16;         // tokens whose share may be spent before they are decoded
  double carried = 1.0;           // plain steps that an answer inherits from those before it, at most
  double stake = 0.5;             // share of the credit that a round of several drafts may risk
  int acquainted = 8;             // verdicts; until then a head is tried whenever that can be paid, and nothing overlaps

  // -- overlap --
  double worth_switching = 1.03;  // predicted gain that makes up for a change between overlap and none
  int stay = 32;                  // rounds between two such changes; each stay in overlap is three times as long as the last

  // -- calibrations --
  double seconds = 0.35;          // that one takes, or a few passes of each kind
  double short_handed = 0.2;      // share of the rounds on fewer threads from which on a moment was crowded
  int doubts = 3;                 // measurements more where a plain step and its parts differ by half
};

inline constexpr Tuning kTuning;

}  // namespace ppsd
