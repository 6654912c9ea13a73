#include <trireme/strategies/pipeline/action.h>

#include <catch_torch.h>
#include <string>

namespace trireme::action_test {

using Catch::Contains;

TEST_CASE("an action is written as it was read") {
  for (const std::string text :
       {"2F0", "0B1", "1I3", "1W3", "0R12", "3SEND_F1", "3RECV_F1", "3SEND_B1", "3RECV_B1",
        "0WAIT_SEND_F0", "0WAIT_SEND_B0", "1UNSHARD", "1RESHARD", "1REDUCE_GRAD",
        "1WAIT_REDUCE_GRAD", "(0F7;3B2)OVERLAP_F_B", ""}) {
    CHECK(to_string(parse_action(text)) == text);
  }
  CHECK(parse_action(" 12F345 ") == PipelineAction{12, ActionKind::kForward, 345});
  CHECK(parse_action(" ( 0F7 ; 3I2 )OVERLAP_F_B").sub_actions[1] ==
        PipelineAction{3, ActionKind::kBackwardInput, 2});
}

TEST_CASE("what is no action is refused, with its cell") {
  for (const std::string text :
       {"F0", "2", "2f0", "2F", "2F0x", "-1F0", "2F-1", "2UNSHARD0", "2OVERLAP_F_B",
        "()OVERLAP_F_B", "(0F7;3B2", "(0F7;3B2)", "(0F7;3SEND_B2)OVERLAP_F_B", "99999999999F0",
        "0F 0", "(0F7;(1F1;1B1)OVERLAP_F_B)OVERLAP_F_B"}) {
    CAPTURE(text);
    CHECK_THROWS_AS(parse_action(text), c10::ValueError);
  }
  CHECK_THROWS_WITH(parse_action("2X0", {3, 5}),
                    Contains("[pipeline] got '2X0' in row 3, column 5"));
}

}  // namespace trireme::action_test
