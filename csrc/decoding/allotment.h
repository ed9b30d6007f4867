// How many drafts each answer has in a round: rows go where they earn most. Pure arithmetic.
//
// The j-th draft of an answer with acceptance a is kept with chance a^j. It costs a row of the verification pass, and its
// share of a draft step that all answers with so many drafts make together. Both are worth the tokens that the round gives
// in this time anyway: long drafts are given where one answer is alone, and none where rows are dear.
#pragma once

#include <vector>

#include "pass_times.h"

namespace ppsd {

struct Allotment {
  std::vector<int> drafts;          // of each answer
  double tokens_per_second = 0.0;   // that the round is expected to give: what a second is worth
  double row_seconds = 0.0;         // of a copy's row in the verification pass, where that is dearest
  double draft_seconds = 0.0;       // of one draft more, its row included
  bool copies = false;              // does a copy's row cost less than the token that it may bring?
};

// While prompts are read, a draft delays the answers that wait for theirs as well: a second is worth no less than what all
// of them give once they write.
//
// acceptance: of each answer that may have drafts. others: rows of the pass besides, of which `writing` are answers' own.
// left: rows that drafts may have in all; most: of one answer. reading: answers whose prompts have rows in the pass.
// copying: answers that may copy. How many find something nobody knows yet: the first row may begin a group of the kernels
// that costs as much as four, and the fifth another one.
Allotment allot(const PassTimes& times, const std::vector<double>& acceptance, int others, int writing, int left, int most,
                int reading, int copying);

}  // namespace ppsd
